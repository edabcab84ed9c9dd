"""What must come out, made without the service: values of experts, torch's own optimizers beside them, promised steps."""
