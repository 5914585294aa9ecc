"""The data sets kerneq knows: where their files lie, what they hold, how to get them, and one of them by its name.

A new data set is an entry of DATA_SETS; one in files of a new form is a parser in `readers` as well.
"""

import dataclasses
import difflib
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import final

from .datasets import AbstractDataSet, DigitsDataSet, FolderDataSet, PackedDataSet
from .images import DataError, Images
from .readers import File, Release, Split, parse_cifar_binary, parse_cifar_python, parse_idx

_FOLDER = "folder:"

# The names of the classes, in the order of their labels.
_DIGITS = tuple("0123456789")
_FASHION = tuple("T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot".split(","))
_CIFAR10 = tuple("airplane automobile bird cat deer dog frog horse ship truck".split())
_CIFAR100 = tuple(
    """apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
    castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
    motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
    poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
    wardrobe whale willow_tree wolf woman worm""".split()
)
_CIFAR100_COARSE = tuple(
    """aquatic_mammals fish flowers food_containers fruit_and_vegetables household_electrical_devices
    household_furniture insects large_carnivores large_man-made_outdoor_things large_natural_outdoor_scenes
    large_omnivores_and_herbivores medium_mammals non-insect_invertebrates people reptiles small_mammals trees
    vehicles_1 vehicles_2""".split()
)
_IMAGENETTE = {  # the folder of each class is its WordNet number; labels follow the sorted numbers
    "n01440764": "tench",
    "n02102040": "English springer",
    "n02979186": "cassette player",
    "n03000684": "chain saw",
    "n03028079": "church",
    "n03394916": "French horn",
    "n03417042": "garbage truck",
    "n03425413": "gas pump",
    "n03445777": "golf ball",
    "n03888257": "parachute",
}

_CIFAR_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
_CIFAR100_GET = f"download cifar-100-python.tar.gz or cifar-100-binary.tar.gz from {_CIFAR_PAGE} and unpack it"
_CIFAR_LICENCE = "no licence stated; cite Krizhevsky, Learning multiple layers of features from tiny images, 2009"
_IMAGENET_LICENCE = "non-commercial research only; cite Russakovsky et al., ImageNet challenge, 2015"

_MNIST = Release(
    train=(
        File("train-images-idx3-ubyte", 47040016, md5="6bbc9ace898e44ae57da46a324031adb"),
        File("train-labels-idx1-ubyte", 60008, md5="a25bea736e30d166cdddb491f175f624"),
    ),
    test=(
        File("t10k-images-idx3-ubyte", 7840016, md5="2646ac647ad5339dbf082846283269ea"),
        File("t10k-labels-idx1-ubyte", 10008, md5="27ae3e4e09519cfbb04c329615203637"),
    ),
    parse=parse_idx,
)
_FASHION_MNIST = Release(  # MD5s are published for the packed files only
    train=(
        File("train-images-idx3-ubyte", 47040016, gz_md5="8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        File("train-labels-idx1-ubyte", 60008, gz_md5="25c81989df183df01b3e8a0aad5dffbe"),
    ),
    test=(
        File("t10k-images-idx3-ubyte", 7840016, gz_md5="bef4ecab320f06d8554ea6380940ec79"),
        File("t10k-labels-idx1-ubyte", 10008, gz_md5="bb300cfdad3c16e7a12a480ee83cd310"),
    ),
    parse=parse_idx,
)
_CIFAR10_PYTHON = Release(
    train=(
        File("data_batch_1", 31035704, "c99cafc152244af753f735de768cd75f"),
        File("data_batch_2", 31035320, "d4bba439e000b95fd0a9bffe97cbabec"),
        File("data_batch_3", 31035999, "54ebc095f3ab1f0389bbae665268c751"),
        File("data_batch_4", 31035696, "634d18415352ddfa80567beed471001a"),
        File("data_batch_5", 31035623, "482c414d41f54cd18b22e5b47cb7c3cb"),
    ),
    test=(File("test_batch", 31035526, "40351d587109b95175f43aff81a1287e"),),
    parse=functools.partial(parse_cifar_python, key=b"labels"),
)
_CIFAR10_BINARY = Release(
    train=tuple(File(f"data_batch_{i}.bin", 30730000) for i in range(1, 6)),
    test=(File("test_batch.bin", 30730000),),
    parse=parse_cifar_binary,
)


def _cifar100(key: bytes, label_byte: int, class_names: tuple[str, ...]) -> PackedDataSet:
    """CIFAR-100 with its fine or its coarse labels, which lie side by side in the same files."""
    python = Release(
        train=(File("train", 155249918, "16019d7e3df5f24257cddd939b257f8d"),),
        test=(File("test", 31049707, "f0ef6b0ae62326f3e7ffdfab6717acfc"),),
        parse=functools.partial(parse_cifar_python, key=key),
    )
    binary = Release(
        train=(File("train.bin", 153700000),),
        test=(File("test.bin", 30740000),),
        parse=functools.partial(parse_cifar_binary, label_bytes=2, label_byte=label_byte),
    )
    return PackedDataSet(
        releases={"cifar-100-python": python, "cifar-100-binary": binary},
        class_names=class_names,
        size=32,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        get=_CIFAR100_GET,
        licence=_CIFAR_LICENCE,
    )


DATA_SETS: Mapping[str, AbstractDataSet] = MappingProxyType(
    {
        "digits": DigitsDataSet(
            class_names=_DIGITS,
            size=8,
            mean=(0.3052,),
            std=(0.3760,),
            get="nothing to do: it comes with scikit-learn",
            licence="CC BY 4.0; cite Alpaydin and Kaynak, Optical recognition of handwritten digits, 1998",
        ),
        "mnist": PackedDataSet(
            releases={"mnist": _MNIST, "MNIST/raw": _MNIST},
            class_names=_DIGITS,
            size=28,
            mean=(0.1307,),
            std=(0.3081,),
            get="put the four idx files, plain or .gz, from http://yann.lecun.com/exdb/mnist into mnist/",
            licence="CC BY-SA 3.0 (LeCun and Cortes); cite LeCun et al., Gradient-based learning, 1998",
        ),
        "fashion-mnist": PackedDataSet(
            releases={"fashion-mnist": _FASHION_MNIST, "FashionMNIST/raw": _FASHION_MNIST},
            class_names=_FASHION,
            size=28,
            mean=(0.2860,),
            std=(0.3530,),
            get="put the four .gz files of github.com/zalandoresearch/fashion-mnist into fashion-mnist/",
            licence="MIT; cite Xiao, Rasul and Vollgraf, Fashion-MNIST, 2017",
        ),
        "cifar10": PackedDataSet(
            releases={"cifar-10-batches-py": _CIFAR10_PYTHON, "cifar-10-batches-bin": _CIFAR10_BINARY},
            class_names=_CIFAR10,
            size=32,
            mean=(0.4914, 0.4822, 0.4465),
            std=(0.2470, 0.2435, 0.2616),
            get=_CIFAR100_GET.replace("100", "10"),
            licence=_CIFAR_LICENCE,
        ),
        "cifar100": _cifar100(b"fine_labels", 1, _CIFAR100),
        "cifar100-coarse": _cifar100(b"coarse_labels", 0, _CIFAR100_COARSE),
        "imagenette": FolderDataSet(
            folders=("imagenette", "imagenette2", "imagenette2-320", "imagenette2-160"),
            size=256,
            class_folders=tuple(_IMAGENETTE),
            class_names=tuple(_IMAGENETTE.values()),
            get="download imagenette2.tgz (or a smaller one) of github.com/fastai/imagenette and unpack it",
            licence=f"Apache 2.0 for the selection; pictures: {_IMAGENET_LICENCE}",
        ),
        "imagenet100": FolderDataSet(
            folders=("imagenet100", "imagenet"),
            size=256,
            class_count=100,
            class_lists=("imagenet100.txt",),
            get=(
                "unpack ImageNet (ILSVRC 2012, from https://image-net.org after signing up) as "
                "imagenet/train/CLASS and imagenet/val/CLASS, and write the 100 classes into "
                "imagenet100.txt, one on each line"
            ),
            licence=_IMAGENET_LICENCE,
        ),
    }
)


def data_root(root: str | Path | None = None) -> Path:
    """Where data sets lie: `root`, else $KERNEQ_DATA, else ~/.cache/kerneq."""
    return Path(root or os.environ.get("KERNEQ_DATA") or "~/.cache/kerneq").expanduser()


def find(name: str) -> AbstractDataSet:
    """The data set of that name, a key of DATA_SETS or "folder:PATH"; looks at no file."""
    if name.startswith(_FOLDER):
        path = _user_path(name)
        get = f"put pictures into {path}/train/CLASS and {path}/test/CLASS"
        return FolderDataSet(folders=(str(path),), size=224, get=get, licence="your own")
    if name in DATA_SETS:
        return DATA_SETS[name]
    close = difflib.get_close_matches(name, DATA_SETS, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise DataError(f"There is no data set {name!r}.{hint} There are: {', '.join(DATA_SETS)}, {_FOLDER}PATH.")


def load(name: str, split: Split, root: str | Path | None = None, size: int | None = None) -> Images:
    """One split, "train" or "test", of a data set of DATA_SETS or of your own pictures, "folder:PATH".

        images = load("cifar10", "train")
        images = load("folder:~/birds", "test", size=64)

    `root` is where data sets lie (by default $KERNEQ_DATA, else ~/.cache/kerneq); `size` is the side to which pictures
    of a folder are resized. Small published sets are read into memory whole, every file checked by its size and, where
    one was published, its MD5; pictures in folders are only listed. The other split's files are never opened. What is
    missing or damaged is a DataError that says what to do."""
    if split not in ("train", "test"):
        raise DataError(f"There is no split {split!r}: ask for 'train' or 'test'.")
    if size is not None and size < 1:
        raise DataError(f"`size` must be at least 1, got {size}.")
    data_set = find(name)
    if name.startswith(_FOLDER) and not _user_path(name).is_dir():
        raise DataError(f"There is no folder {_user_path(name)}: put pictures into its train/CLASS and test/CLASS.")
    return data_set.load(name, split, data_root(root), size)


def _user_path(name: str) -> Path:
    return Path(name.removeprefix(_FOLDER)).expanduser().absolute()


@final
@dataclasses.dataclass(frozen=True)
class Description:
    """What was found of a data set."""

    name: str
    found: bool  # whole, as far as names and sizes of files tell
    path: Path | None  # its folder, if there is one
    problem: str | None  # what is wrong with it, a sentence
    get: str  # how to get it
    licence: str  # and whom to cite


def describe(root: str | Path | None = None) -> list[Description]:
    """A row for every data set of DATA_SETS, there or not.

    Looks at names and sizes of files only, so it is quick; MD5s are for `load` to check."""
    return [_describe(name, data_set, data_root(root)) for name, data_set in DATA_SETS.items()]


def _describe(name: str, data_set: AbstractDataSet, root: Path) -> Description:
    path: Path | None = None
    problem: str | None = None
    try:
        if data_set.candidates():
            path = root / data_set.locate(name, root)
        data_set.check(name, root)
    except DataError as error:
        problem = str(error)
    return Description(name, problem is None, path, problem, data_set.get, data_set.licence)
