"""Memory that outlives a worker: status page, slots, transcripts. No torch. Worker and agent import it."""
