# Bash completion of lrstream. Made from the program's own options by docs/generate.py; not to be edited.
_lrstream() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}
    local path=lrstream i
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$path ${COMP_WORDS[i]}" in
            "lrstream build" | "lrstream convert" | "lrstream validate" | "lrstream publish" | "lrstream inspect" | "lrstream inspect sidecar" | "lrstream inspect dataset" | "lrstream inspect episode" | "lrstream inspect budget" | "lrstream inspect plan" | "lrstream inspect locks" | "lrstream inspect cache" | "lrstream benchmark" | "lrstream benchmark build" | "lrstream benchmark open" | "lrstream benchmark fetch" | "lrstream benchmark loader" | "lrstream benchmark plan") path+=" ${COMP_WORDS[i]}" ;;
        esac
    done
    # A value: one of its choices, or (an empty reply) a file name.
    case "$path $previous" in
        "lrstream --show-completion") COMPREPLY=($(compgen -W "bash zsh fish powershell" -- "$current")); return ;;
        "lrstream build --repo-id") return ;;
        "lrstream build --repo-type") COMPREPLY=($(compgen -W "dataset bucket" -- "$current")); return ;;
        "lrstream build --revision") return ;;
        "lrstream build --episodes") return ;;
        "lrstream build --shard") return ;;
        "lrstream build --output" | "lrstream build -o") return ;;
        "lrstream build --workers") return ;;
        "lrstream build --processes") return ;;
        "lrstream build --scheduler") COMPREPLY=($(compgen -W "ADDRESS local" -- "$current")); return ;;
        "lrstream build --lock-timeout") return ;;
        "lrstream build --base") return ;;
        "lrstream build --progress") COMPREPLY=($(compgen -W "auto json" -- "$current")); return ;;
        "lrstream build --cache-dir") return ;;
        "lrstream convert --output" | "lrstream convert -o") return ;;
        "lrstream convert --to") COMPREPLY=($(compgen -W "index npz parquet" -- "$current")); return ;;
        "lrstream convert --progress") COMPREPLY=($(compgen -W "auto json" -- "$current")); return ;;
        "lrstream convert --cache-dir") return ;;
        "lrstream validate --source") return ;;
        "lrstream validate --episodes") return ;;
        "lrstream validate --sample") COMPREPLY=($(compgen -W "N all" -- "$current")); return ;;
        "lrstream validate --repo-id") return ;;
        "lrstream validate --repo-type") COMPREPLY=($(compgen -W "dataset bucket" -- "$current")); return ;;
        "lrstream validate --revision") return ;;
        "lrstream validate --progress") COMPREPLY=($(compgen -W "auto json" -- "$current")); return ;;
        "lrstream validate --cache-dir") return ;;
        "lrstream publish --repo-type") COMPREPLY=($(compgen -W "dataset bucket" -- "$current")); return ;;
        "lrstream publish --revision") return ;;
        "lrstream publish --cache-dir") return ;;
        "lrstream inspect sidecar --cache-dir") return ;;
        "lrstream inspect dataset --repo-id") return ;;
        "lrstream inspect dataset --repo-type") COMPREPLY=($(compgen -W "dataset bucket" -- "$current")); return ;;
        "lrstream inspect dataset --revision") return ;;
        "lrstream inspect dataset --cache-dir") return ;;
        "lrstream inspect episode --camera") return ;;
        "lrstream inspect episode --mini-mp4") return ;;
        "lrstream inspect episode --contact-sheet") return ;;
        "lrstream inspect episode --pictures") return ;;
        "lrstream inspect episode --repo-id") return ;;
        "lrstream inspect episode --repo-type") COMPREPLY=($(compgen -W "dataset bucket" -- "$current")); return ;;
        "lrstream inspect episode --revision") return ;;
        "lrstream inspect episode --cache-dir") return ;;
        "lrstream inspect budget --byte-budget-gb") return ;;
        "lrstream inspect budget --workers") return ;;
        "lrstream inspect budget --pool") return ;;
        "lrstream inspect budget --world-size") return ;;
        "lrstream inspect budget --prefetch") return ;;
        "lrstream inspect budget --queue") return ;;
        "lrstream inspect budget --seed") return ;;
        "lrstream inspect budget --epoch") return ;;
        "lrstream inspect budget --repo-id") return ;;
        "lrstream inspect budget --repo-type") COMPREPLY=($(compgen -W "dataset bucket" -- "$current")); return ;;
        "lrstream inspect budget --revision") return ;;
        "lrstream inspect budget --cache-dir") return ;;
        "lrstream inspect plan --world-size") return ;;
        "lrstream inspect plan --workers") return ;;
        "lrstream inspect plan --batch-size") return ;;
        "lrstream inspect plan --pool") return ;;
        "lrstream inspect plan --seed") return ;;
        "lrstream inspect plan --epoch") return ;;
        "lrstream inspect plan --repo-type") COMPREPLY=($(compgen -W "dataset bucket" -- "$current")); return ;;
        "lrstream inspect plan --revision") return ;;
        "lrstream inspect plan --cache-dir") return ;;
        "lrstream inspect locks --cache-dir") return ;;
        "lrstream inspect cache --idle-days") return ;;
        "lrstream inspect cache --cache-dir") return ;;
        "lrstream benchmark build --videos") return ;;
        "lrstream benchmark build --workers") return ;;
        "lrstream benchmark build --processes") return ;;
        "lrstream benchmark build --connections") return ;;
        "lrstream benchmark build --compare") return ;;
        "lrstream benchmark build --plot") return ;;
        "lrstream benchmark build --repo-type") COMPREPLY=($(compgen -W "dataset bucket" -- "$current")); return ;;
        "lrstream benchmark build --revision") return ;;
        "lrstream benchmark build --cache-dir") return ;;
        "lrstream benchmark open --episodes") return ;;
        "lrstream benchmark open --world-size") return ;;
        "lrstream benchmark open --workers") return ;;
        "lrstream benchmark open --compare") return ;;
        "lrstream benchmark open --plot") return ;;
        "lrstream benchmark open --repo-type") COMPREPLY=($(compgen -W "dataset bucket" -- "$current")); return ;;
        "lrstream benchmark open --revision") return ;;
        "lrstream benchmark open --cache-dir") return ;;
        "lrstream benchmark fetch --episodes") return ;;
        "lrstream benchmark fetch --count") return ;;
        "lrstream benchmark fetch --at-once") return ;;
        "lrstream benchmark fetch --connections") return ;;
        "lrstream benchmark fetch --subranges") return ;;
        "lrstream benchmark fetch --seed") return ;;
        "lrstream benchmark fetch --compare") return ;;
        "lrstream benchmark fetch --plot") return ;;
        "lrstream benchmark fetch --repo-type") COMPREPLY=($(compgen -W "dataset bucket" -- "$current")); return ;;
        "lrstream benchmark fetch --revision") return ;;
        "lrstream benchmark fetch --cache-dir") return ;;
        "lrstream benchmark loader --workers") return ;;
        "lrstream benchmark loader --batch-size") return ;;
        "lrstream benchmark loader --strategy") COMPREPLY=($(compgen -W "remaining round_robin gop" -- "$current")); return ;;
        "lrstream benchmark loader --episodes") return ;;
        "lrstream benchmark loader --decode-threads") return ;;
        "lrstream benchmark loader --prefetch") return ;;
        "lrstream benchmark loader --pool") return ;;
        "lrstream benchmark loader --budget") return ;;
        "lrstream benchmark loader --reservoir") return ;;
        "lrstream benchmark loader --connections") return ;;
        "lrstream benchmark loader --samples") return ;;
        "lrstream benchmark loader --seconds") return ;;
        "lrstream benchmark loader --consumer-rate") return ;;
        "lrstream benchmark loader --compare") return ;;
        "lrstream benchmark loader --plot") return ;;
        "lrstream benchmark loader --repo-type") COMPREPLY=($(compgen -W "dataset bucket" -- "$current")); return ;;
        "lrstream benchmark loader --revision") return ;;
        "lrstream benchmark loader --cache-dir") return ;;
        "lrstream benchmark plan --bandwidth") return ;;
        "lrstream benchmark plan --latency") return ;;
        "lrstream benchmark plan --decode-rate") return ;;
        "lrstream benchmark plan --consumer-rate") return ;;
        "lrstream benchmark plan --workers") return ;;
        "lrstream benchmark plan --batch-size") return ;;
        "lrstream benchmark plan --strategy") COMPREPLY=($(compgen -W "remaining round_robin gop" -- "$current")); return ;;
        "lrstream benchmark plan --episodes") return ;;
        "lrstream benchmark plan --world-size") return ;;
        "lrstream benchmark plan --rank") return ;;
        "lrstream benchmark plan --pool") return ;;
        "lrstream benchmark plan --prefetch") return ;;
        "lrstream benchmark plan --budget") return ;;
        "lrstream benchmark plan --reservoir") return ;;
        "lrstream benchmark plan --connections") return ;;
        "lrstream benchmark plan --queue") return ;;
        "lrstream benchmark plan --seed") return ;;
        "lrstream benchmark plan --epoch") return ;;
        "lrstream benchmark plan --compare") return ;;
        "lrstream benchmark plan --plot") return ;;
        "lrstream benchmark plan --repo-type") COMPREPLY=($(compgen -W "dataset bucket" -- "$current")); return ;;
        "lrstream benchmark plan --revision") return ;;
        "lrstream benchmark plan --cache-dir") return ;;
    esac
    case "$path" in
        "lrstream")
            COMPREPLY=($(compgen -W "build convert validate publish inspect benchmark --version --show-completion --help -h" -- "$current")) ;;
        "lrstream build")
            [[ "$current" != -* ]] || COMPREPLY=($(compgen -W "--repo-id --repo-type --revision --episodes --shard --output -o --workers --processes --scheduler --lock-timeout --force --no-resume --base --checksums --push --progress --json --quiet -q --verbose -v --debug --cache-dir --help -h" -- "$current")) ;;
        "lrstream convert")
            [[ "$current" != -* ]] || COMPREPLY=($(compgen -W "--merge --output -o --to --dry-run --force --progress --json --quiet -q --verbose -v --debug --cache-dir --help -h" -- "$current")) ;;
        "lrstream validate")
            [[ "$current" != -* ]] || COMPREPLY=($(compgen -W "--source --episodes --rows --no-rows --deep --sample --repo-id --repo-type --revision --progress --json --quiet -q --verbose -v --debug --cache-dir --help -h" -- "$current")) ;;
        "lrstream publish")
            [[ "$current" != -* ]] || COMPREPLY=($(compgen -W "--repo-type --revision --dry-run --force --json --quiet -q --verbose -v --debug --cache-dir --help -h" -- "$current")) ;;
        "lrstream inspect")
            COMPREPLY=($(compgen -W "sidecar dataset episode budget plan locks cache --help -h" -- "$current")) ;;
        "lrstream inspect sidecar")
            [[ "$current" != -* ]] || COMPREPLY=($(compgen -W "--json --quiet -q --verbose -v --debug --cache-dir --help -h" -- "$current")) ;;
        "lrstream inspect dataset")
            [[ "$current" != -* ]] || COMPREPLY=($(compgen -W "--repo-id --repo-type --revision --json --quiet -q --verbose -v --debug --cache-dir --help -h" -- "$current")) ;;
        "lrstream inspect episode")
            [[ "$current" != -* ]] || COMPREPLY=($(compgen -W "--camera --mini-mp4 --contact-sheet --pictures --force --repo-id --repo-type --revision --json --quiet -q --verbose -v --debug --cache-dir --help -h" -- "$current")) ;;
        "lrstream inspect budget")
            [[ "$current" != -* ]] || COMPREPLY=($(compgen -W "--byte-budget-gb --workers --pool --world-size --prefetch --queue --seed --epoch --repo-id --repo-type --revision --json --quiet -q --verbose -v --debug --cache-dir --help -h" -- "$current")) ;;
        "lrstream inspect plan")
            [[ "$current" != -* ]] || COMPREPLY=($(compgen -W "--world-size --workers --batch-size --pool --seed --epoch --repo-type --revision --json --quiet -q --verbose -v --debug --cache-dir --help -h" -- "$current")) ;;
        "lrstream inspect locks")
            [[ "$current" != -* ]] || COMPREPLY=($(compgen -W "--all --break --json --quiet -q --verbose -v --debug --cache-dir --help -h" -- "$current")) ;;
        "lrstream inspect cache")
            [[ "$current" != -* ]] || COMPREPLY=($(compgen -W "--prune --yes -y --idle-days --json --quiet -q --verbose -v --debug --cache-dir --help -h" -- "$current")) ;;
        "lrstream benchmark")
            COMPREPLY=($(compgen -W "build open fetch loader plan --help -h" -- "$current")) ;;
        "lrstream benchmark build")
            [[ "$current" != -* ]] || COMPREPLY=($(compgen -W "--videos --workers --processes --connections --compare --plot --repo-type --revision --json --quiet -q --verbose -v --debug --cache-dir --help -h" -- "$current")) ;;
        "lrstream benchmark open")
            [[ "$current" != -* ]] || COMPREPLY=($(compgen -W "--episodes --world-size --workers --compare --plot --repo-type --revision --json --quiet -q --verbose -v --debug --cache-dir --help -h" -- "$current")) ;;
        "lrstream benchmark fetch")
            [[ "$current" != -* ]] || COMPREPLY=($(compgen -W "--episodes --count --at-once --connections --subranges --seed --compare --plot --repo-type --revision --json --quiet -q --verbose -v --debug --cache-dir --help -h" -- "$current")) ;;
        "lrstream benchmark loader")
            [[ "$current" != -* ]] || COMPREPLY=($(compgen -W "--demo --workers --batch-size --strategy --episodes --decode-threads --prefetch --pool --budget --reservoir --connections --samples --seconds --consumer-rate --compare --plot --repo-type --revision --json --quiet -q --verbose -v --debug --cache-dir --help -h" -- "$current")) ;;
        "lrstream benchmark plan")
            [[ "$current" != -* ]] || COMPREPLY=($(compgen -W "--bandwidth --latency --decode-rate --consumer-rate --workers --batch-size --strategy --episodes --world-size --rank --pool --prefetch --budget --reservoir --connections --queue --seed --epoch --compare --plot --repo-type --revision --json --quiet -q --verbose -v --debug --cache-dir --help -h" -- "$current")) ;;
    esac
}
complete -o default -F _lrstream lrstream
