# Bash completion of lrstream. Made from the program's own options by docs/generate.py; not to be edited.
_lrstream() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}
    local path=lrstream i
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$path ${COMP_WORDS[i]}" in
            "lrstream build") path+=" ${COMP_WORDS[i]}" ;;
        esac
    done
    # A value: one of its choices, or (an empty reply) a file name.
    case "$path $previous" in
        "lrstream --show-completion") COMPREPLY=($(compgen -W "bash zsh fish powershell" -- "$current")); return ;;
        "lrstream build --repo-id") return ;;
        "lrstream build --repo-type") COMPREPLY=($(compgen -W "dataset bucket" -- "$current")); return ;;
        "lrstream build --revision") return ;;
        "lrstream build --episodes") return ;;
        "lrstream build --output" | "lrstream build -o") return ;;
        "lrstream build --workers") return ;;
        "lrstream build --lock-timeout") return ;;
        "lrstream build --cache-dir") return ;;
    esac
    case "$path" in
        "lrstream")
            COMPREPLY=($(compgen -W "build --version --show-completion --help -h" -- "$current")) ;;
        "lrstream build")
            [[ "$current" != -* ]] || COMPREPLY=($(compgen -W "--repo-id --repo-type --revision --episodes --output -o --workers --lock-timeout --force --json --quiet -q --verbose -v --debug --cache-dir --help -h" -- "$current")) ;;
    esac
}
complete -o default -F _lrstream lrstream
