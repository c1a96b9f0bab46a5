"""Plans and explanations as one HTML file, with its style and script."""
