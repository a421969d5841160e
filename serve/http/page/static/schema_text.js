// A JSON Schema as a type, as TypeScript writes it, with remarks behind it.

const DEEPEST = 6; // levels of objects within each other; deeper ones are named only

export function resolve(one, document) {
  if (!one?.$ref) return one;
  return one.$ref.slice(2).split("/").reduce((at, name) => at[name.replaceAll("~1", "/").replaceAll("~0", "~")], document);
}

export function typeText(schema, document, within = []) {
  if (schema?.$ref) {
    const name = schema.$ref.split("/").at(-1);
    return within.includes(name) || within.length >= DEEPEST ? name : typeText(resolve(schema, document), document, [...within, name]);
  }
  if (!schema || !Object.keys(schema).length) return "any value";
  const several = schema.anyOf ?? schema.oneOf;
  if (several) return several.map((one) => typeText(one, document, within)).join(" | ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  return [schema.type ?? "any value"].flat().map((type) => oneType(type, schema, document, within)).join(" | ");
}

function oneType(type, schema, document, within) {
  if (type === "array") {
    const items = typeText(schema.items, document, within);
    return /^[\w ]+$/.test(items) || items.endsWith("}") ? `${items}[]` : `(${items})[]`;
  }
  return type === "object" ? objectText(schema, document, within) : type;
}

function objectText(schema, document, within) {
  const required = new Set(schema.required ?? []);
  const lines = Object.entries(schema.properties ?? {}).map(([name, one]) => {
    const note = remark(one);
    return `${name}${required.has(name) ? "" : "?"}: ${typeText(one, document, within)}${note ? `  // ${note}` : ""}`;
  });
  if (schema.additionalProperties) lines.push(`[any name]: ${typeText(schema.additionalProperties, document, within)}`);
  if (!lines.length) return schema.maxProperties === 0 ? "{}" : "object";
  return `{\n${lines.join("\n").replace(/^/gm, "  ")}\n}`;
}

const LIMITS = { minimum: "at least", maximum: "at most", minItems: "entries: at least", maxItems: "entries: at most", pattern: "like", default: "default", contentMediaType: "holds" };

export function remark(schema) {
  const limits = Object.entries(LIMITS).flatMap(([name, text]) => (schema[name] === undefined ? [] : `${text} ${JSON.stringify(schema[name])}`));
  return [schema.description?.replace(/\.$/, ""), ...limits].filter(Boolean).join("; ");
}
