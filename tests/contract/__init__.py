"""The suite of behaviours that every container kind passes; a new container is done when it does."""
