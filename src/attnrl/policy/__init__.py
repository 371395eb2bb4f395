"""The policy's loss, the same for every engine: losses by name, their sum with KL and entropy, the learning rate."""
