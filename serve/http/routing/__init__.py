"""The OpenAPI document, which is made from the routes and from the types of their bodies."""
