"""What a run is: a TOML file and `key=value` changes, read into a tree of frozen dataclasses."""

from kerneq.config.read import differences as differences
from kerneq.config.read import load as load
from kerneq.config.read import parse as parse
from kerneq.config.schema import Config as Config
from kerneq.config.schema import Data as Data
from kerneq.config.schema import Model as Model
from kerneq.config.schema import Optimizer as Optimizer
from kerneq.config.schema import Schedule as Schedule
from kerneq.config.schema import Training as Training
from kerneq.config.setting import ConfigError as ConfigError
from kerneq.config.toml import write as write
