"""The semantic-ID decoder in plain PyTorch: a beam search that computes and keeps each prompt once."""
