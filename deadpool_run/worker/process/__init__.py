"""The process around the script: start-up, the link to the agent, blame for an exception, its files and threads."""
