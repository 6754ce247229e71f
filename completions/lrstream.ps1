# PowerShell completion of lrstream. Made from the program's own options by docs/generate.py; not to be edited.
Register-ArgumentCompleter -Native -CommandName lrstream -ScriptBlock {
    param($wordToComplete, $commandAst, $cursorPosition)
    $words = @{
        'lrstream' = @(
            ,@('--version', 'Print the version and exit.')
            ,@('--show-completion', 'Print the completion script of a shell and exit.')
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
