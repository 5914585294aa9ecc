"""The data sets kerneq knows: where their files lie, what they hold, how to get them."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from . import names
from .cifar import Cifar, Pickled, Records
from .dataset import AbstractDataSet
from .digits import Digits
from .files import File
from .idx import Idx
from .packed import Packed
from .pictures import Pictures

_CIFAR_LICENCE = "no licence stated; cite Krizhevsky, Learning multiple layers of features from tiny images, 2009"
_IMAGENET_LICENCE = "non-commercial research only; cite Russakovsky et al., ImageNet challenge, 2015"
_CIFAR100_GET = (
    "download cifar-100-python.tar.gz or cifar-100-binary.tar.gz from "
    "https://www.cs.toronto.edu/~kriz/cifar.html and unpack it"
)

_CIFAR10_PYTHON = Cifar(
    folders=("cifar-10-batches-py",),
    train=(
        File("data_batch_1", 31035704, "c99cafc152244af753f735de768cd75f"),
        File("data_batch_2", 31035320, "d4bba439e000b95fd0a9bffe97cbabec"),
        File("data_batch_3", 31035999, "54ebc095f3ab1f0389bbae665268c751"),
        File("data_batch_4", 31035696, "634d18415352ddfa80567beed471001a"),
        File("data_batch_5", 31035623, "482c414d41f54cd18b22e5b47cb7c3cb"),
    ),
    test=(File("test_batch", 31035526, "40351d587109b95175f43aff81a1287e"),),
    form=Pickled(b"labels"),
    classes=10,
)
_CIFAR10_BINARY = Cifar(
    folders=("cifar-10-batches-bin",),
    train=tuple(File(f"data_batch_{i}.bin", 30730000) for i in range(1, 6)),
    test=(File("test_batch.bin", 30730000),),
    form=Records(),
    classes=10,
)


def _cifar100(key: bytes, mark: int, classes: tuple[str, ...]) -> Packed:
    python = Cifar(
        folders=("cifar-100-python",),
        train=(File("train", 155249918, "16019d7e3df5f24257cddd939b257f8d"),),
        test=(File("test", 31049707, "f0ef6b0ae62326f3e7ffdfab6717acfc"),),
        form=Pickled(key),
        classes=len(classes),
    )
    binary = Cifar(
        folders=("cifar-100-binary",),
        train=(File("train.bin", 153700000),),
        test=(File("test.bin", 30740000),),
        form=Records(marks=2, mark=mark),
        classes=len(classes),
    )
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    return Packed((python, binary), classes, mean, std, _CIFAR100_GET, _CIFAR_LICENCE)


_MNIST = Idx(
    folders=("mnist", "MNIST/raw"),
    train=60000,
    test=10000,
    md5=MappingProxyType(  # of the unpacked files
        {
            "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
            "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
            "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
            "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
        }
    ),
)
_FASHION = Idx(
    folders=("fashion-mnist", "FashionMNIST/raw"),
    train=60000,
    test=10000,
    md5=MappingProxyType(  # published for the packed files only
        {
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        }
    ),
)

DATA_SETS: Mapping[str, AbstractDataSet] = MappingProxyType(
    {
        "digits": Packed(
            layouts=(Digits(),),
            classes=names.DIGITS,
            mean=(0.3052,),
            std=(0.3760,),
            get="nothing to do: it comes with scikit-learn",
            licence="CC BY 4.0; cite Alpaydin and Kaynak, Optical recognition of handwritten digits, 1998",
        ),
        "mnist": Packed(
            layouts=(_MNIST,),
            classes=names.DIGITS,
            mean=(0.1307,),
            std=(0.3081,),
            get="put the four idx files, plain or .gz, from http://yann.lecun.com/exdb/mnist into mnist/",
            licence="CC BY-SA 3.0 (LeCun and Cortes); cite LeCun et al., Gradient-based learning, 1998",
        ),
        "fashion-mnist": Packed(
            layouts=(_FASHION,),
            classes=names.FASHION,
            mean=(0.2860,),
            std=(0.3530,),
            get="put the four .gz files of github.com/zalandoresearch/fashion-mnist into fashion-mnist/",
            licence="MIT; cite Xiao, Rasul and Vollgraf, Fashion-MNIST, 2017",
        ),
        "cifar10": Packed(
            layouts=(_CIFAR10_PYTHON, _CIFAR10_BINARY),
            classes=names.CIFAR10,
            mean=(0.4914, 0.4822, 0.4465),
            std=(0.2470, 0.2435, 0.2616),
            get=_CIFAR100_GET.replace("100", "10"),
            licence=_CIFAR_LICENCE,
        ),
        "cifar100": _cifar100(b"fine_labels", 1, names.CIFAR100),
        "cifar100-coarse": _cifar100(b"coarse_labels", 0, names.CIFAR100_COARSE),
        "imagenette": Pictures(
            folders=("imagenette", "imagenette2", "imagenette2-320", "imagenette2-160"),
            classes=MappingProxyType(names.IMAGENETTE),
            count=None,
            lists=(),
            size=256,
            get="download imagenette2.tgz (or a smaller one) of github.com/fastai/imagenette and unpack it",
            licence=f"Apache 2.0 for the selection; pictures: {_IMAGENET_LICENCE}",
        ),
        "imagenet100": Pictures(
            folders=("imagenet100", "imagenet"),
            classes=None,
            count=100,
            lists=("imagenet100.txt",),
            size=256,
            get=(
                "unpack ImageNet (ILSVRC 2012, from https://image-net.org after signing up) as "
                "imagenet/train/CLASS and imagenet/val/CLASS, and write the 100 classes into "
                "imagenet100.txt, one on each line"
            ),
            licence=_IMAGENET_LICENCE,
        ),
    }
)


def user_folder(path: Path) -> Pictures:
    """A user's own pictures."""
    return Pictures(
        folders=(str(path),),
        classes=None,
        count=None,
        lists=(),
        size=224,
        get=f"put pictures into {path}/train/CLASS and {path}/test/CLASS",
        licence="your own",
    )
