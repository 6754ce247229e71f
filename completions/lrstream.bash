# Bash completion of lrstream. Made from the program's own options by docs/generate.py; not to be edited.
_lrstream() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}
    local path=lrstream i
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$path ${COMP_WORDS[i]}" in
            ) path+=" ${COMP_WORDS[i]}" ;;
        esac
    done
    # A value: one of its choices, or (an empty reply) a file name.
    case "$path $previous" in
        "lrstream --show-completion") COMPREPLY=($(compgen -W "bash zsh fish powershell" -- "$current")); return ;;
    esac
    case "$path" in
        "lrstream")
            [[ "$current" != -* ]] || COMPREPLY=($(compgen -W "--version --show-completion --help -h" -- "$current")) ;;
    esac
}
complete -o default -F _lrstream lrstream
