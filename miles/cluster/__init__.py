"""Ray: where actors stand, what runs in them, and how the launcher talks to them. Nothing else imports Ray."""
