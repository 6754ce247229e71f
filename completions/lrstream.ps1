# PowerShell completion of lrstream. Made from the program's own options by docs/generate.py; not to be edited.
Register-ArgumentCompleter -Native -CommandName lrstream -ScriptBlock {
    param($wordToComplete, $commandAst, $cursorPosition)
    $words = @{
        'lrstream' = @(
            ,@('build', 'Index the videos of a dataset.')
            ,@('validate', 'Check a sidecar and the dataset it belongs to.')
            ,@('publish', 'Publish a sidecar beside its dataset on the Hub.')
            ,@('benchmark', 'Measure how fast a dataset streams.')
            ,@('--version', 'Print the version and exit.')
            ,@('--show-completion', 'Print the completion script of a shell and exit.')
            ,@('--help', 'Show this message and exit.')
            ,@('-h', 'Show this message and exit.')
        )
        'lrstream build' = @(
            ,@('--repo-id', 'Name of the dataset in the sidecar''s identity (default: derived from SOURCE).')
            ,@('--repo-type', 'What OWNER/NAME means on the Hub.')
            ,@('--revision', 'Branch, tag or commit of a Hub dataset.')
            ,@('--episodes', 'Only the files of these episodes, such as 0-9,12,20- (ends included); needs --output.')
            ,@('--output', 'Write the sidecar to this file, not to the cache.')
            ,@('-o', 'Write the sidecar to this file, not to the cache.')
            ,@('--workers', 'Files indexed at once.')
            ,@('--lock-timeout', 'Longest wait for another process that builds the same sidecar.')
            ,@('--force', 'Build even if a valid sidecar is there.')
            ,@('--push', 'Publish it beside the dataset afterwards (see publish).')
            ,@('--json', 'Print one JSON document and nothing else.')
            ,@('--quiet', 'No progress, warnings or notices; errors are still told.')
            ,@('-q', 'No progress, warnings or notices; errors are still told.')
            ,@('--verbose', 'Tell each step on stderr.')
            ,@('-v', 'Tell each step on stderr.')
            ,@('--debug', 'Everything, and tracebacks of failures.')
            ,@('--cache-dir', 'Local caches, instead of $HF_LEROBOT_HOME (default: ~/.cache/huggingface/lerobot).')
            ,@('--help', 'Show this message and exit.')
            ,@('-h', 'Show this message and exit.')
        )
        'lrstream validate' = @(
            ,@('--source', 'Dataset that the sidecar TARGET should belong to.')
            ,@('--episodes', 'Check these episodes only, such as 0-9,12,20-.')
            ,@('--rows', 'Check the rows of the tables too, which reads them (default: if TARGET is a dataset).')
            ,@('--no-rows', 'Check the rows of the tables too, which reads them (default: if TARGET is a dataset).')
            ,@('--deep', 'Index every video again, and compare with the sidecar.')
            ,@('--repo-id', 'Name of the dataset in the sidecar''s identity (default: derived from SOURCE).')
            ,@('--repo-type', 'What OWNER/NAME means on the Hub.')
            ,@('--revision', 'Branch, tag or commit of a Hub dataset.')
            ,@('--json', 'Print one JSON document and nothing else.')
            ,@('--quiet', 'No progress, warnings or notices; errors are still told.')
            ,@('-q', 'No progress, warnings or notices; errors are still told.')
            ,@('--verbose', 'Tell each step on stderr.')
            ,@('-v', 'Tell each step on stderr.')
            ,@('--debug', 'Everything, and tracebacks of failures.')
            ,@('--cache-dir', 'Local caches, instead of $HF_LEROBOT_HOME (default: ~/.cache/huggingface/lerobot).')
            ,@('--help', 'Show this message and exit.')
            ,@('-h', 'Show this message and exit.')
        )
        'lrstream publish' = @(
            ,@('--repo-type', 'What OWNER/NAME means on the Hub.')
            ,@('--revision', 'Branch, tag or commit of a Hub dataset.')
            ,@('--dry-run', 'Check everything, write nothing.')
            ,@('--force', 'Replace another valid sidecar of the same snapshot.')
            ,@('--json', 'Print one JSON document and nothing else.')
            ,@('--quiet', 'No progress, warnings or notices; errors are still told.')
            ,@('-q', 'No progress, warnings or notices; errors are still told.')
            ,@('--verbose', 'Tell each step on stderr.')
            ,@('-v', 'Tell each step on stderr.')
            ,@('--debug', 'Everything, and tracebacks of failures.')
            ,@('--cache-dir', 'Local caches, instead of $HF_LEROBOT_HOME (default: ~/.cache/huggingface/lerobot).')
            ,@('--help', 'Show this message and exit.')
            ,@('-h', 'Show this message and exit.')
        )
        'lrstream benchmark' = @(
            ,@('loader', 'Stream one epoch and check that every frame arrives once.')
            ,@('--help', 'Show this message and exit.')
            ,@('-h', 'Show this message and exit.')
        )
        'lrstream benchmark loader' = @(
            ,@('--demo', 'Write a small dataset and use that.')
            ,@('--workers', 'DataLoader workers.')
            ,@('--batch-size', 'Samples of a batch.')
            ,@('--strategy', 'How frames are drawn from the pool of episodes.')
            ,@('--repo-type', 'What OWNER/NAME means on the Hub.')
            ,@('--revision', 'Branch, tag or commit of a Hub dataset.')
            ,@('--json', 'Print one JSON document and nothing else.')
            ,@('--quiet', 'No progress, warnings or notices; errors are still told.')
            ,@('-q', 'No progress, warnings or notices; errors are still told.')
            ,@('--verbose', 'Tell each step on stderr.')
            ,@('-v', 'Tell each step on stderr.')
            ,@('--debug', 'Everything, and tracebacks of failures.')
            ,@('--cache-dir', 'Local caches, instead of $HF_LEROBOT_HOME (default: ~/.cache/huggingface/lerobot).')
            ,@('--help', 'Show this message and exit.')
            ,@('-h', 'Show this message and exit.')
        )
    }
    $values = @{
        'lrstream --show-completion' = @(
            ,@('bash', 'bash')
            ,@('zsh', 'zsh')
            ,@('fish', 'fish')
            ,@('powershell', 'powershell')
        )
        'lrstream build --repo-id' = @()
        'lrstream build --repo-type' = @(
            ,@('dataset', 'dataset')
            ,@('bucket', 'bucket')
        )
        'lrstream build --revision' = @()
        'lrstream build --episodes' = @()
        'lrstream build --output' = @()
        'lrstream build -o' = @()
        'lrstream build --workers' = @()
        'lrstream build --lock-timeout' = @()
        'lrstream build --cache-dir' = @()
        'lrstream validate --source' = @()
        'lrstream validate --episodes' = @()
        'lrstream validate --repo-id' = @()
        'lrstream validate --repo-type' = @(
            ,@('dataset', 'dataset')
            ,@('bucket', 'bucket')
        )
        'lrstream validate --revision' = @()
        'lrstream validate --cache-dir' = @()
        'lrstream publish --repo-type' = @(
            ,@('dataset', 'dataset')
            ,@('bucket', 'bucket')
        )
        'lrstream publish --revision' = @()
        'lrstream publish --cache-dir' = @()
        'lrstream benchmark loader --workers' = @()
        'lrstream benchmark loader --batch-size' = @()
        'lrstream benchmark loader --strategy' = @(
            ,@('remaining', 'remaining')
            ,@('round_robin', 'round_robin')
        )
        'lrstream benchmark loader --repo-type' = @(
            ,@('dataset', 'dataset')
            ,@('bucket', 'bucket')
        )
        'lrstream benchmark loader --revision' = @()
        'lrstream benchmark loader --cache-dir' = @()
    }
    $path = 'lrstream'
    $previous = ''
    foreach ($element in $commandAst.CommandElements | Select-Object -Skip 1) {
        if ($element.Extent.EndOffset -ge $cursorPosition) { break }
        $previous = $element.ToString()
        if ($words.ContainsKey("$path $previous")) { $path = "$path $previous" }
    }
    # A value: one of its choices, or (no result) a file name.
    if ($values.ContainsKey("$path $previous")) { $found = $values["$path $previous"] }
    else { $found = $words[$path] }
    $found | Where-Object { $_[0] -like "$wordToComplete*" } | ForEach-Object {
        [System.Management.Automation.CompletionResult]::new($_[0], $_[0], 'ParameterValue', $_[1])
    }
}
