"""Memory that outlives a worker: status page, slots, transcripts. No torch."""
