"""The runs of this machine, live and ended: their records, logs and journals as users see them. Commands, report and screen import it."""
