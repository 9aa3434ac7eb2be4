"""YOLOv5n on COCO: a detector whose box arithmetic must stay in float (`configs/yolo_w8a8.yaml` says why and how).

    python examples/ptq_yolo.py
    python examples/ptq_yolo.py --config onnxruntime        # the backend's defaults, for comparison
    python examples/ptq_yolo.py --placement measured        # the layers in integers that are fastest on this machine

The file gives the raw predictions; what picks the boxes (`detections`) stays in Python. mAP needs pycocotools; without
it the table shows only the SQNR of the predictions. The weights are AGPL-3.0: use them to measure, not to ship.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import CONFIGS, arguments, existing, export, finish, sqnr_db
from PIL import Image
from torch import nn

import sparsebit

SIZE = 640
Picture = tuple[torch.Tensor, float, int, int]  # (1, 3, 640, 640) in [0, 1], its scale, its left and top border


def letterbox(file: Path) -> Picture:
    """The picture in the middle of a gray square, its sides in proportion."""
    picture = Image.open(file).convert("RGB")
    scale = SIZE / max(picture.size)
    width, height = round(picture.width * scale), round(picture.height * scale)
    left, top = (SIZE - width) // 2, (SIZE - height) // 2
    square = Image.new("RGB", (SIZE, SIZE), (114, 114, 114))
    square.paste(picture.resize((width, height), Image.Resampling.BILINEAR), (left, top))
    return torch.from_numpy(np.array(square)).permute(2, 0, 1)[None].float() / 255, scale, left, top


def detections(prediction: torch.Tensor, threshold: float = 0.001) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(boxes x1 y1 x2 y2, scores, classes) of one image: at most 300, overlaps within a class removed."""
    products = prediction[:, 5:] * prediction[:, 4:5]
    index, classes = torch.nonzero(products > threshold, as_tuple=True)
    scores = products[index, classes]
    order = scores.argsort(descending=True)[:5000]
    scores, index, classes = scores[order], index[order], classes[order]
    centre, half = prediction[index, :2], prediction[index, 2:4] / 2
    boxes = torch.cat([centre - half, centre + half], 1)
    keep = _suppress((boxes + classes[:, None] * 12 * SIZE).numpy())[:300]  # an offset per class: classes never overlap
    return boxes[keep], scores[keep], classes[keep]


def _suppress(boxes: np.ndarray, overlap: float = 0.6) -> list[int]:
    """Indices of the boxes (best first) that overlap no better one."""
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    keep, left = [], np.arange(len(boxes))
    while left.size:
        best, left = left[0], left[1:]
        keep.append(int(best))
        sides = np.minimum(boxes[best, 2:], boxes[left, 2:]) - np.maximum(boxes[best, :2], boxes[left, :2])
        shared = sides.clip(0).prod(1)
        left = left[shared <= overlap * (areas[best] + areas[left] - shared)]
    return keep


@torch.no_grad()
def predict(model: nn.Module, pictures: list[Picture], device: str) -> list[torch.Tensor]:
    """Per picture (anchors, 85): centre, size, objectness, 80 class scores."""
    return [model(pixels.to(device))[0].cpu() for pixels, *_ in pictures]


def average_precision(truth: Any, ids: list[int], pictures: list[Picture], predictions: list[torch.Tensor]) -> float:
    """COCO's mean average precision, overlaps 0.5 to 0.95."""
    from pycocotools.cocoeval import COCOeval

    categories, found = truth.getCatIds(), []
    for image, (_, scale, left, top), prediction in zip(ids, pictures, predictions, strict=True):
        for box, score, label in zip(*detections(prediction), strict=True):
            x1, y1, x2, y2 = ((box - torch.tensor([left, top, left, top])) / scale).tolist()
            place = [x1, y1, x2 - x1, y2 - y1]
            found.append({"image_id": image, "category_id": categories[label], "bbox": place, "score": float(score)})
    if not found:  # pycocotools stumbles over an empty list
        return 0.0
    evaluation = COCOeval(truth, truth.loadRes(found), "bbox")
    evaluation.params.imgIds = ids
    evaluation.evaluate(), evaluation.accumulate(), evaluation.summarize()
    return float(evaluation.stats[0])


def main() -> None:
    parser = arguments(__doc__, limit="images", config=str(CONFIGS / "yolo_w8a8.yaml"))
    parser.add_argument("--placement", default="default", help="default, measured, or the file of a placement")
    parser.add_argument("--placement-seconds", type=float, default=60.0, help="about how long placements are tried")
    parser.add_argument("--save-placement", type=Path, metavar="FILE", help="keep what --placement measured finds")
    options = parser.parse_args()
    sys.path.insert(0, str(existing(options.data / "yolov5n")))
    from yolov5n_plain import load  # the architecture stands beside its weights

    model, coco = load(str(options.data / "yolov5n" / "yolov5n_state_dict.pt")), existing(options.data / "coco_tiny")
    files = sorted((coco / "val2017").glob("*.jpg"))[: options.limit]
    pictures, ids = [letterbox(file) for file in files], [int(file.stem) for file in files]
    calibration = [letterbox(file)[0] for file in sorted((coco / "train2017").glob("*.jpg"))[: options.limit]]

    qmodel = sparsebit.quantize(
        *(model, calibration, options.config),
        placement=options.placement,
        placement_seconds=options.placement_seconds,
    )
    if qmodel.placement is not None:
        print(qmodel.placement, file=sys.stderr)
        if options.save_placement is not None:
            qmodel.placement.save(options.save_placement)

    exported = export(qmodel, options, "yolov5n", example=calibration[0], free={0: "batch"}, check=calibration)

    device = qmodel.config.DEVICE
    models = {"float": model.to(device), "quantized": qmodel} | ({"file": exported.model} if exported else {})
    outputs = {name: predict(candidate, pictures, device) for name, candidate in models.items()}
    scores: dict[str, dict[str, float]] = {name: {} for name in outputs}
    if importlib.util.find_spec("pycocotools"):
        from pycocotools.coco import COCO

        with contextlib.redirect_stdout(io.StringIO()):  # pycocotools tells its whole story on stdout
            truth = COCO(coco / "annotations" / "instances_val2017.json")
            for name, found in outputs.items():
                scores[name]["mAP 50-95"] = average_precision(truth, ids, pictures, found)
    for name in outputs.keys() - {"float"}:
        scores[name]["output SQNR dB"] = sqnr_db(torch.stack(outputs[name]), torch.stack(outputs["float"]))
    finish(qmodel, calibration[0], scores, options, exported)


if __name__ == "__main__":
    main()
