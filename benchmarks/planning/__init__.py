"""Plans and simulations of training steps, most of which never run."""
