/* The site's search runs in a worker, which browsers refuse to pages that are opened from a folder. There, its script runs in
   a hidden frame instead. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      const load = (source) =>
        new Promise((loaded, failed) => {
          const script = inside.document.createElement("script")
          Object.assign(script, { src: source, onload: loaded, onerror: failed })
          inside.document.body.append(script)
        })
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = (...sources) => sources.reduce((earlier, source) => earlier.then(() => load(source)), Promise.resolve())
      this.ready = load(url)
    }
    postMessage(data) {
      const inside = this.frame.contentWindow
      this.ready.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }
    terminate() {
      this.frame.remove()
    }
  }
}
