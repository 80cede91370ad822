"""What every part shares: values, protocols, errors, configuration, the registry and the framework controller."""
