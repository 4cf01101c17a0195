"""Plants faults in every Python process that has this folder on PYTHONPATH.

TREADLE_PLANTED is a JSON list of objects: a `module` whose text is to read `after` where it reads
`before`. A module without that text does not load. Without the variable nothing happens.
"""

import json
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader

PLANTED = {each["module"]: each for each in json.loads(os.environ.get("TREADLE_PLANTED", "[]"))}


class Planted(SourceFileLoader):
    """Loads the changed text, past all that is cached."""

    def get_code(self, fullname):
        source, fault = self.get_data(self.path).decode(), PLANTED[fullname]
        if source.count(fault["before"]) != 1:
            raise ImportError(f"{fullname} does not read\n{fault['before']}")
        return self.source_to_code(source.replace(fault["before"], fault["after"]), self.path)


class Planter:
    """Finds their modules before anyone else does."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        del target
        found = PathFinder.find_spec(name, path) if name in PLANTED else None
        if found is None or found.origin is None:
            return None
        planted = Planted(name, found.origin)
        return ModuleSpec(
            name, planted, origin=found.origin, is_package=bool(found.submodule_search_locations)
        )


if PLANTED:
    sys.meta_path.insert(0, Planter)
