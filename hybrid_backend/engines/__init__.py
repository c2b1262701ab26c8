"""Engine adapters: thin, one folder per engine."""
