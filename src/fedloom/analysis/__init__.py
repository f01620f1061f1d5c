"""What a finished run is good for: its models opened, cut, compared, exported and audited."""
