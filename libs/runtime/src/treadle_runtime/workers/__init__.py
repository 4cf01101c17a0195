"""Worker processes: how a process and its workers talk, and how they are kept alive."""
