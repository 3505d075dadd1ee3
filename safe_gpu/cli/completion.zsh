#compdef safe-gpu
# zsh completion for safe-gpu, written by: safe-gpu completion zsh
_safe_gpu() {
    local -a answer
    answer=("${(@f)$(safe-gpu completion zsh -- "${(@Q)words[1,CURRENT]}" 2>/dev/null)}")
    if [[ $answer[1] == <-> ]]; then
        shift $answer[1] words
        ((CURRENT -= answer[1]))
        _normal
    elif [[ -n $answer[1] ]]; then
        _describe safe-gpu answer
    fi
}
if [ "$funcstack[1]" = _safe_gpu ]; then
    _safe_gpu "$@"
else
    compdef _safe_gpu safe-gpu
fi
