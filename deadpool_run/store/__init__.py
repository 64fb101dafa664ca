"""The job's store: a server for torch's TCPStore clients, which serves only processes of the job's user."""
