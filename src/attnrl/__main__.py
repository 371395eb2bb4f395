from attnrl.cli import entry

entry()
