# Fish completion of lrstream. Made from the program's own options by docs/generate.py; not to be edited.
function __lrstream_path
    set -l path lrstream
    for word in (commandline -opc)[2..-1]
        switch "$path $word"
            case 
                set path "$path $word"
        end
    end
    echo $path
end

complete -c lrstream -n 'test (__lrstream_path) = "lrstream"' -l version -d 'Print the version and exit.'
complete -c lrstream -n 'test (__lrstream_path) = "lrstream"' -l show-completion -x -a 'bash zsh fish powershell' -d 'Print the completion script of a shell and exit.'
complete -c lrstream -n 'test (__lrstream_path) = "lrstream"' -l help -s h -d 'Show this message and exit.'
