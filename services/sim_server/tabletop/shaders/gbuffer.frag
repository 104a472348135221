#version 450
// Hemispheric ambient light and two fixed directional lights: no shadows, no textures, no tables to compute.

layout(set = 0, binding = 0) uniform CameraBuffer {
  mat4 viewMatrix;
  mat4 projectionMatrix;
  mat4 viewMatrixInverse;
  mat4 projectionMatrixInverse;
  float width;
  float height;
} cameraBuffer;

layout(set = 1, binding = 0) uniform ObjectTransformBuffer { mat4 modelMatrix; } objectTransformBuffer;
layout(set = 1, binding = 1) uniform ObjectDataBuffer {
  uvec4 segmentation;
  float transparency;
  int shadeFlat;
} objectDataBuffer;

layout(set = 2, binding = 0) uniform MaterialBuffer {
  vec4 emission;
  vec4 baseColor;
  float fresnel;
  float roughness;
  float metallic;
  float transmission;
  float ior;
  float transmissionRoughness;
  int textureMask;
  int padding1;
  vec4 textureTransforms[6];
} materialBuffer;

struct PointLight { vec4 position; vec4 emission; };
struct DirectionalLight { vec4 direction; vec4 emission; };
struct SpotLight { vec4 position; vec4 direction; vec4 emission; };

// SAPIEN asks for a scene buffer at set 3, binding 0, even where nothing reads it.
layout(set = 3, binding = 0) uniform SceneBuffer {
  vec4 ambientLight;
  PointLight pointLights[10];
  DirectionalLight directionalLights[3];
  SpotLight spotLights[10];
  SpotLight texturedLights[1];
} sceneBuffer;

layout(location = 0) in vec3 inNormal;
layout(location = 0) out vec4 outColor;

const vec3 SKY = vec3(0.52, 0.54, 0.58);
const vec3 GROUND = vec3(0.20, 0.19, 0.18);
const vec3 KEY_DIRECTION = normalize(vec3(-0.45, -0.65, 1.0));
const vec3 FILL_DIRECTION = normalize(vec3(0.8, -0.5, 0.3));

void main() {
  vec3 normal = normalize(inNormal);
  vec3 light = mix(GROUND, SKY, 0.5 + 0.5 * normal.z);
  light += vec3(0.55, 0.53, 0.50) * max(dot(normal, KEY_DIRECTION), 0.0);
  light += vec3(0.14, 0.15, 0.18) * max(dot(normal, FILL_DIRECTION), 0.0);
  vec3 color = clamp(materialBuffer.baseColor.rgb * light, 0.0, 1.0);
  outColor = vec4(pow(color, vec3(1.0 / 2.2)), 1.0);
}
