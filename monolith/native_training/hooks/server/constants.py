"""Names shared by the controller's server and its clients."""

# In the model folder: `<ip>:<port>` of the server.
SERVER_ADDR_FILENAME = "controller_server_addr.txt"
