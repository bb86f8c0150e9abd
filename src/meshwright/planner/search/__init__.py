"""Every legal layout, ranked; bounds that leave most of them unseen; what one change buys."""
