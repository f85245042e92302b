"""Work on whole model folders, and pages made from declarations."""
