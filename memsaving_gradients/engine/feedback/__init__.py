"""What users are told while gradients are made: notes and warnings, and how far planning is."""
