"""What a trainer's threads do when: for whoever waits for them, times them or draws them."""
