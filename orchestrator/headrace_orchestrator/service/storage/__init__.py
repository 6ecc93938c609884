"""Log, index and projection behind one store: writing, replay at a start, retention."""
