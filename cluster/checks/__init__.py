"""What every backend of a stage must do, as checks that run over any of them: `genrec backends check module:Class`."""
