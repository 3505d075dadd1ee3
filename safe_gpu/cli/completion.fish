# fish completion for safe-gpu, written by: safe-gpu completion fish
function __safe_gpu
    set -l word (commandline -ct)
    set -l found (safe-gpu completion fish -- (commandline -opc) "$word" 2>/dev/null)
    if string match -qr '^[0-9]+$' -- "$found[1]"
        __fish_complete_subcommand --fcs-skip=$found[1]
    else
        printf '%s\n' $found
    end
end
complete -c safe-gpu -f -a '(__safe_gpu)'
