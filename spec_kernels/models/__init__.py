"""What is computed: configurations, rotary embeddings, weights, layers, target and drafter."""
