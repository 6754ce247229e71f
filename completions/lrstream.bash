# Bash completion of lrstream. Made from the program's own options by docs/generate.py; not to be edited.
_lrstream() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}
    local path=lrstream i
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$path ${COMP_WORDS[i]}" in
            "lrstream build" | "lrstream validate" | "lrstream publish" | "lrstream benchmark" | "lrstream benchmark loader") path+=" ${COMP_WORDS[i]}" ;;
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
        "lrstream validate --source") return ;;
        "lrstream validate --episodes") return ;;
        "lrstream validate --repo-id") return ;;
        "lrstream validate --repo-type") COMPREPLY=($(compgen -W "dataset bucket" -- "$current")); return ;;
        "lrstream validate --revision") return ;;
        "lrstream validate --cache-dir") return ;;
        "lrstream publish --repo-type") COMPREPLY=($(compgen -W "dataset bucket" -- "$current")); return ;;
        "lrstream publish --revision") return ;;
        "lrstream publish --cache-dir") return ;;
        "lrstream benchmark loader --workers") return ;;
        "lrstream benchmark loader --batch-size") return ;;
        "lrstream benchmark loader --strategy") COMPREPLY=($(compgen -W "remaining round_robin" -- "$current")); return ;;
        "lrstream benchmark loader --repo-type") COMPREPLY=($(compgen -W "dataset bucket" -- "$current")); return ;;
        "lrstream benchmark loader --revision") return ;;
        "lrstream benchmark loader --cache-dir") return ;;
    esac
    case "$path" in
        "lrstream")
            COMPREPLY=($(compgen -W "build validate publish benchmark --version --show-completion --help -h" -- "$current")) ;;
        "lrstream build")
            [[ "$current" != -* ]] || COMPREPLY=($(compgen -W "--repo-id --repo-type --revision --episodes --output -o --workers --lock-timeout --force --push --json --quiet -q --verbose -v --debug --cache-dir --help -h" -- "$current")) ;;
        "lrstream validate")
            [[ "$current" != -* ]] || COMPREPLY=($(compgen -W "--source --episodes --rows --no-rows --deep --repo-id --repo-type --revision --json --quiet -q --verbose -v --debug --cache-dir --help -h" -- "$current")) ;;
        "lrstream publish")
            [[ "$current" != -* ]] || COMPREPLY=($(compgen -W "--repo-type --revision --dry-run --force --json --quiet -q --verbose -v --debug --cache-dir --help -h" -- "$current")) ;;
        "lrstream benchmark")
            COMPREPLY=($(compgen -W "loader --help -h" -- "$current")) ;;
        "lrstream benchmark loader")
            [[ "$current" != -* ]] || COMPREPLY=($(compgen -W "--demo --workers --batch-size --strategy --repo-type --revision --json --quiet -q --verbose -v --debug --cache-dir --help -h" -- "$current")) ;;
    esac
}
complete -o default -F _lrstream lrstream
