"""The process around the script: start-up, the link to the agent, what an exception means. The loop imports it."""
