"""Views: how the program of one replica becomes a program over the devices. One final class a file, over one base."""
