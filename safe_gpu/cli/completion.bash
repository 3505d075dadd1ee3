# bash completion for safe-gpu, written by: safe-gpu completion bash
_safe_gpu() {
    local found files=(-A file)
    mapfile -t found < <(safe-gpu completion bash -- "${COMP_WORDS[@]:0:COMP_CWORD+1}" 2>/dev/null)
    if [[ ${found-} != [0-9]* ]]; then
        COMPREPLY=("${found[@]}")
    elif declare -F _command_offset >/dev/null; then
        _command_offset "$found"
    else
        ((found == COMP_CWORD)) && files+=(-A command)
        compopt -o filenames 2>/dev/null
        mapfile -t COMPREPLY < <(compgen "${files[@]}" -- "${COMP_WORDS[COMP_CWORD]}")
    fi
}
complete -F _safe_gpu safe-gpu
