"""A trained model: opened, asked, served."""
