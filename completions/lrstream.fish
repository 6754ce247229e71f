# Fish completion of lrstream. Made from the program's own options by docs/generate.py; not to be edited.
function __lrstream_path
    set -l path lrstream
    for word in (commandline -opc)[2..-1]
        switch "$path $word"
            case 'lrstream build'
                set path "$path $word"
        end
    end
    echo $path
end

complete -c lrstream -n 'test (__lrstream_path) = "lrstream"' -f
complete -c lrstream -n 'test (__lrstream_path) = "lrstream"' -a build -d 'Index the videos of a dataset.'
complete -c lrstream -n 'test (__lrstream_path) = "lrstream"' -l version -d 'Print the version and exit.'
complete -c lrstream -n 'test (__lrstream_path) = "lrstream"' -l show-completion -x -a 'bash zsh fish powershell' -d 'Print the completion script of a shell and exit.'
complete -c lrstream -n 'test (__lrstream_path) = "lrstream"' -l help -s h -d 'Show this message and exit.'
complete -c lrstream -n 'test (__lrstream_path) = "lrstream build"' -l repo-id -x -d 'Name of the dataset in the sidecar'"'"'s identity (default: derived from SOURCE).'
complete -c lrstream -n 'test (__lrstream_path) = "lrstream build"' -l repo-type -x -a 'dataset bucket' -d 'What OWNER/NAME means on the Hub.'
complete -c lrstream -n 'test (__lrstream_path) = "lrstream build"' -l revision -x -d 'Branch, tag or commit of a Hub dataset.'
complete -c lrstream -n 'test (__lrstream_path) = "lrstream build"' -l episodes -x -d 'Only the files of these episodes, such as 0-9,12,20- (ends included); needs --output.'
complete -c lrstream -n 'test (__lrstream_path) = "lrstream build"' -l output -s o -r -d 'Write the sidecar to this file, not to the cache.'
complete -c lrstream -n 'test (__lrstream_path) = "lrstream build"' -l workers -x -d 'Files indexed at once.'
complete -c lrstream -n 'test (__lrstream_path) = "lrstream build"' -l lock-timeout -x -d 'Longest wait for another process that builds the same sidecar.'
complete -c lrstream -n 'test (__lrstream_path) = "lrstream build"' -l force -d 'Build even if a valid sidecar is there.'
complete -c lrstream -n 'test (__lrstream_path) = "lrstream build"' -l json -d 'Print one JSON document and nothing else.'
complete -c lrstream -n 'test (__lrstream_path) = "lrstream build"' -l quiet -s q -d 'No progress, warnings or notices; errors are still told.'
complete -c lrstream -n 'test (__lrstream_path) = "lrstream build"' -l verbose -s v -d 'Tell each step on stderr.'
complete -c lrstream -n 'test (__lrstream_path) = "lrstream build"' -l debug -d 'Everything, and tracebacks of failures.'
complete -c lrstream -n 'test (__lrstream_path) = "lrstream build"' -l cache-dir -r -d 'Local caches, instead of $HF_LEROBOT_HOME (default: ~/.cache/huggingface/lerobot).'
complete -c lrstream -n 'test (__lrstream_path) = "lrstream build"' -l help -s h -d 'Show this message and exit.'
