"""Other packages' names and argument orders, mapped thinly onto our ops."""
