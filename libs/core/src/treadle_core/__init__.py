"""The vocabulary: tasks, tickets, segments, episodes, groups, versions. Pure; numpy only."""
