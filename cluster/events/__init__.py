"""What users did, kept so that an answer can be given to a user id alone."""
