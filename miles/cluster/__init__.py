"""Ray: the placement of actors, the code that runs in them, and their drivers. Nothing else imports Ray."""
