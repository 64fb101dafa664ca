"""Memory that outlives a worker: board, slots, transcripts. No torch."""
