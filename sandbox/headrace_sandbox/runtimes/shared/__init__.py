"""Parts that several runtimes share: sessions, files, archives, results, guest modules."""
