"""Pictures of the tasks: MuJoCo's offscreen renderer where there is GL, else drawn with Pillow."""

import contextlib

import numpy as np
from PIL import Image, ImageDraw

SIZE = 480
GREEN, RED, BLUE, GREY = (0.2, 0.75, 0.25), (0.85, 0.2, 0.2), (0.2, 0.4, 0.9), (0.55, 0.55, 0.55)


def draw_circle(env, row: int) -> np.ndarray:
    """The rewarded circle (blue) and the edges of the free strip (red)."""
    angles = np.linspace(0, 2 * np.pi, 121)
    ring = env.radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    reach = env.radius + 3.0
    lines = [(ring[i], ring[i + 1], BLUE) for i in range(120)]
    for x in (-env.strip, env.strip):
        lines.append((np.array([x, -reach]), np.array([x, reach]), RED))
    return draw(env, row, reach, lines, spots=[])


def draw_gather(env, row: int) -> np.ndarray:
    """Apples (green), bombs (red) and the border of the field."""
    from envs.gather import LATTICE

    places = LATTICE[env.cells[row]]
    spots = [(place, GREEN if k < env.apples else RED) for k, place in enumerate(places)]
    corner = np.array([(-6.5, -6.5), (6.5, -6.5), (6.5, 6.5), (-6.5, 6.5), (-6.5, -6.5)])
    lines = [(corner[i], corner[i + 1], GREY) for i in range(4)]
    return draw(env, row, 7.5, lines, spots)


def draw(env, row: int, reach: float, lines: list, spots: list) -> np.ndarray:
    """A picture of the square |x|, |y| <= reach around the origin."""
    if not hasattr(env, "_scene"):
        env._scene = open_scene(env.body)
    if env._scene is None:
        return draw_flat(env.body, row, reach, lines, spots)
    return draw_scene(env._scene, env.body, row, reach, lines, spots)


def open_scene(body):
    """(model, data, renderer) or None where no GL context can be made."""
    import mujoco

    with contextlib.suppress(ImportError):
        # In CUDA builds of torch the first optimizer loads Triton. Its LLVM takes the names of the
        # LLVM that OpenGL has made global, and the process dies; the other way round both live.
        import triton  # noqa: F401
    try:
        model = getattr(body, "model", None) or mujoco.MjModel.from_xml_path(body.model_file)
        model.geom_matid[0], model.geom_rgba[0] = -1, (0.86, 0.88, 0.84, 1.0)  # a plain floor
        return model, mujoco.MjData(model), mujoco.Renderer(model, SIZE, SIZE)
    except Exception:  # every GL backend has its own way to fail; a flat picture is still one
        return None


def draw_scene(scene, body, row: int, reach: float, lines: list, spots: list) -> np.ndarray:
    import mujoco

    model, data, renderer = scene
    data.qpos[:] = body.qpos(row)
    mujoco.mj_forward(model, data)
    camera = mujoco.MjvCamera()
    camera.distance, camera.elevation, camera.azimuth = 2.6 * reach, -65, 90
    renderer.update_scene(data, camera)

    def add(kind, size, place, color):
        if renderer.scene.ngeom >= renderer.scene.maxgeom:
            return None
        geom = renderer.scene.geoms[renderer.scene.ngeom]
        rgba = np.array([*color, 1.0], np.float32)
        mujoco.mjv_initGeom(geom, kind, size, place, np.eye(3).ravel(), rgba)
        renderer.scene.ngeom += 1
        return geom

    for start, end, color in lines:
        geom = add(mujoco.mjtGeom.mjGEOM_CAPSULE, np.zeros(3), np.zeros(3), color)
        ends = np.array([*start, 0.05]), np.array([*end, 0.05])
        if geom is not None:
            mujoco.mjv_connector(geom, mujoco.mjtGeom.mjGEOM_CAPSULE, 0.012 * reach, *ends)
    for place, color in spots:
        add(mujoco.mjtGeom.mjGEOM_SPHERE, np.full(3, 0.45), np.array([*place, 0.45]), color)
    return renderer.render()


def draw_flat(body, row: int, reach: float, lines: list, spots: list) -> np.ndarray:
    image = Image.new("RGB", (SIZE, SIZE), (236, 240, 236))
    canvas = ImageDraw.Draw(image)
    scale = SIZE / (2 * reach)

    def pixel(place) -> tuple[float, float]:
        return SIZE / 2 + scale * place[0], SIZE / 2 - scale * place[1]

    def ink(color) -> tuple[int, ...]:
        return tuple(int(255 * part) for part in color)

    def disc(place, radius, color):
        x, y = pixel(place)
        canvas.ellipse(
            [x - radius * scale, y - radius * scale, x + radius * scale, y + radius * scale],
            fill=color,
        )

    for start, end, color in lines:
        canvas.line([pixel(start), pixel(end)], fill=ink(color), width=3)
    for place, color in spots:
        disc(place, 0.45, ink(color))
    place, yaw = body.where[row], body.yaw[row]
    nose = place + 0.9 * np.array([np.cos(yaw), np.sin(yaw)])
    disc(place, 0.5, (60, 60, 60))
    canvas.line([pixel(place), pixel(nose)], fill=(60, 60, 60), width=4)
    return np.asarray(image)


def draw_lqr(env, row: int) -> np.ndarray:
    """x as a ball on a line from -5 to 5."""
    image = Image.new("RGB", (SIZE, SIZE // 4), (236, 240, 236))
    canvas = ImageDraw.Draw(image)
    middle = SIZE // 8
    canvas.line([(10, middle), (SIZE - 10, middle)], fill=(60, 60, 60), width=2)
    canvas.line([(SIZE // 2, middle - 15), (SIZE // 2, middle + 15)], fill=(60, 60, 60), width=2)
    x = SIZE / 2 + float(np.clip(env.x[row], -5, 5)) / 5 * (SIZE / 2 - 20)
    canvas.ellipse([x - 10, middle - 10, x + 10, middle + 10], fill=(51, 102, 230))
    return np.asarray(image)


def record_gif(
    env_id: str, act, path: str, seed: int = 0, steps: int = 300, every: int = 2
) -> None:
    """An animated GIF of one env: `act` maps observations (1, obs) to actions (1, act)."""
    from envs import make_vec

    env, frames = make_vec(env_id, 1, seed=seed, render_mode="rgb_array"), []
    obs, _ = env.reset()
    for step in range(steps):
        obs, *_ = env.step(act(obs))
        if step % every == 0:
            frames.append(Image.fromarray(env.render()[0]))
    env.close()
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=50, loop=0)
