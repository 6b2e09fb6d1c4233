"""What people read: the table for the terminal and the page that holds everything."""
