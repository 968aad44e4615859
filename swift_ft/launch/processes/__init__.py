"""The processes of a machine that run the script: the standby, and the workers that it forks."""
